"""The models of a configuration: every key, its type, default and meaning. Knows no file, catalogue or driver.

`Config` is one run, fully resolved. A sweep (base, axes, points) is read and expanded by `experiments.sweepfile`.
Models are strict: in pydantic's lax mode `macro: no` and `seed: true` would silently become something else.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

import traces

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Frac = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def check_preset(value: Any) -> Any:
    """A catalogue name, or a mapping that names one and changes single values: {preset: NAME, KEY: VALUE, ...}."""
    if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("preset"), str)):
        return value
    raise ValueError("should be a name or a mapping {preset: NAME, KEY: VALUE, ...}")


# Checked before the union, which would report an error per member.
Preset = Annotated[str | dict[str, Any], BeforeValidator(check_preset)]


class Strict(BaseModel):
    """Wrong types and unknown keys are errors; the docstring under a field is its meaning in `infsim list keys`."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class Cluster(Strict):
    nodes: PositiveInt = 4
    """number of nodes"""
    gpus_per_node: PositiveInt = 8
    """GPUs in each node"""
    intra_link: Preset = "nvlink3"
    """link between the GPUs of a node"""
    inter_link: Preset = "ethernet-100g"
    """link between nodes; ethernet-1g is the 125 MB/s the paper states"""

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Instance(Strict):
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer; must divide the model's heads (layout single: chosen)"""
    pipeline_parallel: PositiveInt = 1
    """pipeline stages; must divide the model's layers"""
    block_tokens: PositiveInt = 16
    """tokens in a KV block"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """share of a GPU's memory the engine may use"""
    reserve_bytes: NonNegative | None = None
    """bytes a GPU keeps for its runtime; null: the documented default"""
    blocks_per_gpu: PositiveInt | None = None
    """KV blocks a GPU, in place of the computed capacity"""
    max_batch: PositiveInt | None = None
    """most requests running at once; null: memory alone decides"""
    token_budget: PositiveInt = 2048
    """most tokens of an iteration, decode rows first"""
    headroom_frac: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """share of the blocks kept back for growth when prompts are admitted"""


class Scheduler(Strict):
    batch_threshold: PositiveInt = 64
    """Algorithm 1's beta_thres: a debtor's batch is at most this (empirical in the paper, our starting point)"""
    memory_threshold_frac: Frac = 0.8
    """Algorithm 1's U_thres: a creditor's memory utilisation is at most this (our starting point)"""
    period_s: Positive = 1.0
    """time between two plans"""
    heartbeat_s: Positive = 1.0
    """time between two heartbeats"""
    lease_s: Positive = 10.0
    """a loan not renewed for this long is over"""
    renew_s: Positive = 2.0
    """time between two renewals of a loan"""
    order_ttl_s: Positive = 3.0
    """an order resting on an older heartbeat is refused"""
    lent_cap_frac: Frac = 0.5
    """most of an instance's blocks the throughput path may lend"""
    move_tokens_per_iteration: PositiveInt = 256
    """tokens of KV moved per decode iteration: about what half a 100 Gb/s link carries in 20 ms (16 on the paper's link)"""


class TraceWorkload(Strict):
    trace: str
    """format of a recorded trace (infsim list traces)"""
    path: str
    """the trace's file, relative to this configuration"""
    window_s: Annotated[list[NonNegative], Field(min_length=2, max_length=2)] | None = None
    """[a, b): only the requests that arrive in it, re-based to 0"""
    num_requests: PositiveInt | None = None
    """only the first so many requests"""
    rate_rps: Positive | None = None
    """mean arrival rate; the gaps are scaled, lengths stay. null: as recorded"""
    jitter: bool = False
    """spread arrivals within the recording's tick (seeded), where the format has one"""
    max_context_tokens: PositiveInt | None = None
    """longest input + output; null: no limit but the pool"""
    over_long: Literal["error", "drop", "clip_input"] = "error"
    """what to do with a longer request"""
    keep_failed: bool = False
    """keep rows without input or output (dropped and counted by default)"""
    tokenizer: str | None = None
    """a tokenizer.json, for formats that hold text (sharegpt)"""

    @model_validator(mode="after")
    def check(self) -> Self:
        self.options(seed=0)
        return self

    def options(self, seed: int) -> traces.LoadOptions:
        """As the loader takes them. Raises InputError for values that do not go together."""
        return traces.LoadOptions(seed=seed, **self.model_dump(exclude={"trace", "path"}))


class GeneratorWorkload(Strict):
    generator: str
    """name of a generator (infsim list generators)"""
    output: str | None = None
    """how a context splits into input and output: chat, balanced, prompt-heavy, share-50. null: balanced, where the
    generator does not draw its own outputs"""
    num_requests: PositiveInt = 2000
    """number of requests"""
    params: dict[str, Any] = Field(default_factory=dict)
    """the generator's own parameters, e.g. {input_tokens: 512, output_tokens: 128} of fixed"""
    arrivals: Literal["poisson", "gamma", "piecewise", "ramp", "diurnal", "closed", "saturated"] = "poisson"
    """arrival process; saturated: everything at time 0; closed: users who wait for their answers"""
    rate_rps: Positive | None = None
    """mean arrival rate of all but closed and saturated. null: the recorded one of an empirical generator"""
    cv: Positive = 1.0
    """coefficient of variation of the gaps of gamma"""
    profile: list[list[NonNegative]] | None = None
    """steps of piecewise: [[start_s, share of rate_rps], ...]"""
    period_s: Positive = 86400.0
    """length of a ramp, period of diurnal"""
    depth: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """how far ramp and diurnal fall below rate_rps"""
    users: PositiveInt | None = None
    """number of users of closed"""
    think_s: NonNegative = 0.0
    """mean pause of a user between an answer and the next request of closed"""
    think_cv: NonNegative = 1.0
    """coefficient of variation of think_s; 0: constant"""
    max_context_tokens: PositiveInt | None = None
    """longest input + output; null: no limit but the pool"""
    over_long: Literal["error", "drop", "clip_input"] = "error"
    """what to do with a longer request"""

    @model_validator(mode="after")
    def check(self) -> Self:
        self.options(seed=0)
        return self

    def options(self, seed: int) -> traces.GenerateOptions:
        """As the generator takes them. Raises InputError for values that do not go together."""
        return traces.GenerateOptions(seed=seed, **self.model_dump(exclude={"generator"}))


def workload_kind(value: Any) -> str:
    """Tag of a workload: what it names."""
    names = value if isinstance(value, dict) else vars(value) if isinstance(value, Strict) else {}
    return "trace" if "trace" in names else "generator"


WorkloadConfig = Annotated[
    Annotated[TraceWorkload, Tag("trace")] | Annotated[GeneratorWorkload, Tag("generator")],
    Discriminator(workload_kind),
]


class Costs(Strict):
    pack: str | None = None
    """profile pack by name or path; null: the pack of the GPU"""
    scale: dict[str, Positive] = Field(default_factory=dict)
    """factors on parts of the time, e.g. {decode_attention: 1.2}"""


class Real(Strict):
    weights: str | None = None
    """on hardware: a Hugging Face directory, a .gguf file or smollm2; null: those beside the model's config.json, else random"""
    stop_at_eos: bool = False
    """on hardware: end an output at the model's end token; false: at the length the workload says"""


class Slo(Strict):
    ttft_s: Positive = 10.0
    """time to first token allowed to every request"""
    ttft_s_per_1k_tokens: NonNegative = 1.0
    """and for every 1,000 tokens of its input"""
    tpot_s: Positive = 0.1
    """mean time between tokens allowed"""


class Record(Strict):
    sample_s: Positive = 1.0
    """time between two rows of instances.parquet"""


class Chaos(Strict):
    delay_s: NonNegative = 0.0
    """most extra delay of a message between managers"""
    reorder: Frac = 0.0
    """share of messages overtaken by later ones"""
    duplicate: Frac = 0.0
    """share of messages delivered twice"""
    loss: Frac = 0.0
    """share of messages lost"""
    kill: list[Annotated[list[NonNegative], Field(min_length=3, max_length=3)]] = Field(default_factory=list)
    """[t_s, instance, back_s]: the instance dies at t_s and returns, empty, at back_s"""


SYSTEMS = {  # name -> (layout, placement, what it is)
    "vllm-multi": ("multi", "none", "many small instances, no sharing"),
    "vllm-single": ("single", "none", "one instance of all GPUs"),
    "infinite-llm": ("multi", "greedy", "many small instances that lend KV memory to each other (Algorithm 1)"),
}


class Config(Strict):
    """One run. `layout` and `placement` are those of `system` where they are null (`resolved`)."""

    system: Literal["infinite-llm", "vllm-multi", "vllm-single"] = "infinite-llm"
    """serving system; sets layout and placement where they are null"""
    layout: Literal["multi", "single"] | None = None
    """multi: instances of tensor_parallel x pipeline_parallel GPUs; single: one instance of all GPUs"""
    placement: str | None = None
    """who lends KV memory to whom: none, reactive (when memory runs out), greedy (Algorithm 1), or file.py:Class"""
    dispatch: str = "least-loaded"
    """which instance gets a request: least-loaded, round-robin, or file.py:Class"""
    batching: str = "chunked"
    """who runs in an iteration: chunked, prefill-first, or file.py:Class"""
    model: str = "llama2-7b"
    """a catalogue name, or the path of a Hugging Face config.json"""
    dtype: str | None = None
    """type of weights and activations; null: the model's"""
    kv_dtype: str | None = None
    """type of the KV cache; null: the model's"""
    gpu: Preset = "a100-80gb"
    """GPU by name, or {preset: NAME, KEY: VALUE}"""
    cluster: Cluster = Field(default_factory=Cluster)
    """the machines"""
    instance: Instance = Field(default_factory=Instance)
    """one instance of the engine"""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    """the managers of pooled memory"""
    workload: WorkloadConfig
    """what arrives: a recorded trace or a generator"""
    engine: Preset = "graphs"
    """the engine: graphs, eager-2023, or {preset: graphs, splits_all_heads: true}"""
    belief: Costs = Field(default_factory=Costs)
    """the times a policy predicts with"""
    truth: Costs = Field(default_factory=Costs)
    """the times the simulator charges"""
    slo: Slo = Field(default_factory=Slo)
    """service-level objective behind goodput"""
    record: Record = Field(default_factory=Record)
    """what is recorded"""
    macro: bool = True
    """price a decode batch that does not change in one step; false: the slow reference"""
    chaos: Chaos | None = None
    """faults of messages and instances"""
    real: Real = Field(default_factory=Real)
    """what only runs on hardware need"""
    seed: NonNegativeInt = 0
    """seed of everything random"""
    replicates: PositiveInt = 1
    """runs of each point; replicate r uses seed + r"""

    def resolved(self) -> "Config":
        """The same run with `layout` and `placement` filled in from `system`."""
        layout, placement, _ = SYSTEMS[self.system]
        return self.model_copy(update={"layout": self.layout or layout, "placement": self.placement or placement})


# Section of a configuration -> its model.
SECTIONS: dict[str, type[BaseModel]] = {
    "": Config,
    "cluster": Cluster,
    "instance": Instance,
    "scheduler": Scheduler,
    "workload.trace": TraceWorkload,
    "workload.generator": GeneratorWorkload,
    "belief": Costs,
    "truth": Costs,
    "slo": Slo,
    "record": Record,
    "chaos": Chaos,
    "real": Real,
}
