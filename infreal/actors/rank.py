"""One rank of an instance at work, as it is ordered: iterations, and a thread for each read served and each copy.

Rank 0 of an instance has a machine that decides what is ordered (`instance`); the others have an ear for it (`follower`).
"""

import itertools
import threading
from collections.abc import Callable, Mapping

from infreal.actors.copies import receive_copy, send_copy
from infreal.actors.orders import (
    Accept,
    BeginStep,
    Done,
    Drop,
    EndStep,
    Iterate,
    Job,
    Order,
    ReceiveCopy,
    Renew,
    Report,
    SendCopy,
    ServeRead,
    States,
    Suspect,
)
from infreal.actors.pairs import Pairs
from infreal.executor import Executor, Unanswered
from infreal.requests import Requests
from infreal.transport import PairReset, TransportError
from perfmodel.messages import IterationsDone

Spawn = Callable[[Callable[[], None], str], None]  # (work, name): a thread whose errors rank 0 hears of
PATIENCE = 3.0  # deadlines: a peer that waits for another one itself is not silent


class Rank:
    """tell(report): to rank 0."""

    def __init__(self, executor: Executor, requests: Requests, tell: Callable[[Report], None], spawn: Spawn) -> None:
        self.executor, self.requests, self.tell, self._spawn = executor, requests, tell, spawn
        self.pairs = executor.transport = Pairs(executor.transport)
        self.progress_s = 0.0  # when an iteration or a copy last ended
        self._states: States = {}  # of the step in progress
        self._iterated = threading.Condition()  # an iteration has begun, or a step has ended

    def obey(self, order: Order) -> None:
        match order:
            case Accept(req_id):
                self.executor.accept(req_id, self.requests.text(req_id))
            case Drop(req_id):
                self.executor.texts.pop(req_id, None)
            case BeginStep(number, max_iterations, rows, reads, stale, states):
                self._states = states
                self.executor.start(number, max_iterations, rows, reads, stale)
            case Iterate(added):
                self.iterate(added)
            case EndStep():
                self._end_step()
            case Job(number, ServeRead() as work):
                self._spawn(lambda: self._serve(number, work), "serves")
            case Job(number, SendCopy() as work):
                self._spawn(lambda: self._send(number, work), "sends")
            case Job(number, ReceiveCopy() as work):
                self._spawn(lambda: self._receive(number, work), "receives")
            case Job(number, Renew(peer)):
                self.pairs.reset(peer)
                self.tell(Done(number))

    # ---- iterations ----------------------------------------------------------------------------------------------------------
    def iterate(self, added: list[list[int]]) -> IterationsDone:
        """One iteration of the step in progress; one that is void has been judged when this returns."""
        with self._iterated:
            self._iterated.notify_all()
        try:
            with self.pairs.bound(self._states):
                done = self.executor.proceed(added)
        except Unanswered as failure:
            self._await_verdict({peer: self._states[peer] for peer in failure.peers}, failure.errors)
            done = self.executor.give_up()
        self.progress_s = self.executor.now_s()
        return done

    def _end_step(self) -> None:
        step = self.executor.end()
        with self._iterated:
            self._iterated.notify_all()
        with self.pairs.bound(self._states):
            self.executor.end_reads(step.parts)

    # ---- exchanges beside them -----------------------------------------------------------------------------------------------
    def _serve(self, job: int, work: ServeRead) -> None:
        executor = self.executor
        serving = executor.serve(work.rows, work.tables)
        layers = itertools.cycle(range(executor.decoder.config.num_layers))

        def answer_all() -> None:
            while executor.answer(serving, work.reader, work.read, next(layers), PATIENCE):
                pass

        self.tell(Done(job, ok=self._exchange(work.states, answer_all)))

    def _send(self, job: int, work: SendCopy) -> None:
        wait = self._pacer() if work.pace_blocks else lambda: None

        def send() -> None:
            send_copy(self.executor, work.peer, work.tag, work.blocks, work.pace_blocks, wait)

        self.tell(Done(job, ok=self._exchange(work.states, send), nothing=not work.blocks))

    def _receive(self, job: int, work: ReceiveCopy) -> None:
        came = False

        def receive() -> None:
            nonlocal came
            came = receive_copy(self.executor, work.peer, work.tag, work.blocks, PATIENCE)

        took_place = self._exchange(work.states, receive)
        self.tell(Done(job, ok=came, nothing=took_place and not came))

    def _exchange(self, states: States, work: Callable[[], None]) -> bool:
        """Whether it took place; a failure has been judged when this returns."""
        try:
            with self.pairs.bound(states):
                work()
        except TransportError as error:
            self._await_verdict(states, dict.fromkeys(states, error))
            return False
        self.progress_s = self.executor.now_s()
        return True

    def _pacer(self) -> Callable[[], None]:
        """Returns once an iteration, or at once where nothing runs."""
        sent_in = -1

        def wait() -> None:
            nonlocal sent_in
            executor = self.executor
            with self._iterated:
                free = lambda: executor.step is None or executor.num_iterations != sent_in  # noqa: E731
                self._iterated.wait_for(free, executor.deadline_s)
            sent_in = executor.num_iterations

        return wait

    def _await_verdict(self, states: States, errors: Mapping[int, TransportError]) -> None:
        """An exchange has failed: the head finds out who is alive, and has lost peers forgotten and pairs made again.

        Nothing that rests on the exchange is reported before, since it would be tried again at once.
        """
        for peer in self.pairs.unchanged(states):
            if peer in errors and not isinstance(errors[peer], PairReset):
                self.tell(Suspect(peer, str(errors[peer])))
        self.pairs.wait_for_change(states, PATIENCE * self.executor.deadline_s)
