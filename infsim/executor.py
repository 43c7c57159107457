"""Executor: one simulated instance. It knows how long its requests' outputs are, and prices and times the steps it is given."""

from heapq import heappop, heappush

from perfmodel.basis import worst
from perfmodel.cost import CostModel
from perfmodel.messages import IterationsDone, LoanId, StartIterations
from perfmodel.pricing import StepPrice, Surroundings, price_step


class Executor:
    """Runs one step at a time. `left`: output tokens that each request here has still to give."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.left: dict[int, int] = {}
        self.step: StartIterations | None = None
        self.start_s = 0.0
        self.end_iterations = 0  # of the step in progress, as planned now
        self.stuck = False  # its iteration waits for a peer that is lost, or that has refused
        self.batch_changed = False  # against the step before
        self.basis_s: dict[str, float] = {}
        self.num_iterations = 0
        self._reported = 0
        self._price: StepPrice | None = None
        self._counter = 0  # decode iterations done
        self._finish_at: dict[int, int] = {}  # value of the counter with each row's last token
        self._finishes: list[tuple[int, int]] = []  # heap of (counter, req_id); entries of rows that left are stale
        self._finished = False
        self._shape: tuple[object, ...] = ()

    def accept(self, req_id: int, output_tokens: int) -> None:
        """A new attempt comes here; what an earlier one had still to give does not count."""
        self.left[req_id] = output_tokens
        self._finish_at.pop(req_id, None)

    # ---- a step --------------------------------------------------------------------------------------------------------------
    def start(self, step: StartIterations, now_s: float, around: Surroundings) -> None:
        for req_id in step.left:
            if req_id in self._finish_at:
                self.left[req_id] = self._finish_at.pop(req_id) - self._counter
        for req_id in step.joined:
            self._finish_at[req_id] = self._counter + self.left[req_id]
            heappush(self._finishes, (self._finish_at[req_id], req_id))
        self.step, self.start_s, self._reported, self.stuck = step, now_s, 0, False
        shape = (step.decode_rows, step.chunks, step.remote, step.chunk_remote)
        self.batch_changed = bool(step.joined or step.left or self._finished or shape != self._shape)
        self._shape = shape
        self.end_iterations = step.max_iterations
        if step.decode_rows:
            self.end_iterations = min(step.max_iterations, self._first_finish() - self._counter)
        self._price = price_step(self.cost, step, around, self.end_iterations)

    @property
    def end_s(self) -> float:
        """When the step in progress ends."""
        assert self._price is not None
        return self.start_s + self._price.time.total_s(self.end_iterations)

    @property
    def iteration_s(self) -> float:
        """Duration of the first iteration of the step in progress; 0 where there is none."""
        return self._price.time.duration_s(0) if self.step is not None and self._price is not None else 0.0

    def cut(self) -> bool:
        """End the step at the next boundary. False where it ends there anyway."""
        if self.step is None or self.stuck or self.end_iterations <= self._reported + 1:
            return False
        self.end_iterations = self._reported + 1
        return True

    def settle(self, now_s: float) -> IterationsDone | None:
        """Iterations that are complete by now and not reported yet."""
        if self.step is None or self.stuck or self.end_iterations == 1:
            return None
        assert self._price is not None
        done = self._price.time.completed(now_s - self.start_s, self.end_iterations - 1)
        return self._report(done, ended=False) if done > self._reported else None

    def end(self) -> IterationsDone:
        """The step in progress has reached its end."""
        assert self.step is not None
        done = self._report(self.end_iterations, ended=True)
        self._account(self.step)
        self.step = None
        return done

    def abort(self, stale: tuple[LoanId, ...] = ()) -> IterationsDone:
        """The iteration in progress cannot be completed: it gives no token, and the step ends."""
        assert self.step is not None
        step, self.step = self.step, None
        self._finished = False
        return IterationsDone(step.step, 0, (), ended=True, stale=stale, iteration_s=0.0)

    # ---- its progress --------------------------------------------------------------------------------------------------------
    def _report(self, iterations: int, ended: bool) -> IterationsDone:
        assert self.step is not None and self._price is not None
        new, before, self._reported = iterations - self._reported, self._reported, iterations
        self.num_iterations += new
        if self.step.decode_rows:
            self._counter += new
        finished = self._take_finished(self.step) if ended else ()
        self._finished = bool(finished)
        price = self._price
        waited_s = 0.0
        if price.alone is not price.time:
            waited_s = (price.time.total_s(iterations) - price.time.total_s(before)) - (
                price.alone.total_s(iterations) - price.alone.total_s(before)
            )
        last_s = price.time.duration_s(iterations - 1)
        return IterationsDone(self.step.step, new, finished, ended, waited_s, iteration_s=last_s)

    def _take_finished(self, step: StartIterations) -> tuple[int, ...]:
        finished = []
        for chunk in step.chunks:
            if chunk.last:
                self.left[chunk.req_id] -= 1
                if not self.left[chunk.req_id]:
                    finished.append(chunk.req_id)
        while self._finish_at and self._first_finish() <= self._counter:
            req_id = heappop(self._finishes)[1]
            del self._finish_at[req_id]
            finished.append(req_id)
        for req_id in finished:
            del self.left[req_id]
        return tuple(finished)

    def _first_finish(self) -> int:
        heap = self._finishes
        while self._finish_at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0]

    def _account(self, step: StartIterations) -> None:
        """Add the step's seconds to the way their price is known."""
        assert self._price is not None
        price, rows = self._price, step.decode_rows
        total_s = price.time.total_s(self.end_iterations)
        kernels_s, hosts_s = price.kernel_s * self.end_iterations, price.host_s * self.end_iterations
        basis = self.cost.iteration_basis(price.tokens, rows, step.decode_context_tokens)
        attention = [basis.attention] if rows else []
        attention += [self.cost.prefill_basis(chunk.tokens, chunk.prefix_tokens) for chunk in step.chunks]
        seconds = (kernels_s, total_s - kernels_s - hosts_s, hosts_s)
        for name, part_s in zip((basis.kernels, worst(*attention), basis.host), seconds, strict=True):
            self.basis_s[name] = self.basis_s.get(name, 0.0) + part_s
