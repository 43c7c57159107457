"""Profile packs: where the curves of a cost model come from."""

from perfmodel.cost import CostModel
from perfmodel.curves import analytic_curves
from perfmodel.errors import unknown
from perfmodel.specs import InstanceSpec

ANALYTIC = "analytic"


def cost_model(instance: InstanceSpec, pack: str | None = None, scale: dict[str, float] | None = None) -> CostModel:
    """The cost model of an instance. `pack` None: the GPU's own, else analytic."""
    name = pack or instance.gpu.pack or ANALYTIC
    if name != ANALYTIC:
        raise unknown("pack", name, [ANALYTIC])
    return CostModel(instance, analytic_curves(instance.gpu, instance.model.dtype_bytes), scale)
