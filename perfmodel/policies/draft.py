"""A plan in the making: the loads as its moves will leave them, and the room that is left."""

from collections.abc import Iterable
from math import ceil

from perfmodel.view import ClusterView, Load, Movable, Move, RemoteRead, read_of


class Draft:
    """Starts from a view and takes moves; the view itself is not changed. spare_blocks: what the whole plan may still lend."""

    def __init__(self, view: ClusterView) -> None:
        self.loads = dict(view.loads)
        self.moves: list[Move] = []
        self._view = view
        self.spare_blocks = max(0, sum(load.room_blocks for load in view.loads.values()) - view.room_kept_blocks)

    def room_blocks(self, instance: int) -> int:
        """Blocks that the throughput path may still lend here: free ones less headroom, below the lent cap, and cluster-wide
        no more than a waiting capacity order leaves."""
        load = self.loads[instance]
        cap = int(self._view.params.lent_cap_frac * load.total_blocks) - load.lent_blocks
        return max(0, min(load.room_blocks, cap, self.spare_blocks))

    def pace_blocks(self, instance: int) -> int:
        """Blocks that a debtor can move within a period, less those on their way."""
        load, params = self.loads[instance], self._view.params
        if not load.iteration_s:
            return load.total_blocks
        tokens = params.period_s / load.iteration_s * params.move_tokens_per_iteration
        return max(0, ceil(tokens / self._view.block_tokens) - load.pledged_blocks)

    def order(self, move: Move) -> None:
        """Take a move up. Its blocks are pledged at the debtor: no longer read there, not free yet."""
        assert 0 < move.num_blocks <= self.room_blocks(move.dst), move
        tokens = move.num_blocks * self._view.block_tokens
        self.moves.append(move)
        self.spare_blocks -= move.num_blocks
        self.loads[move.src] = _lend(self.loads[move.src], move, tokens)
        self.loads[move.dst] = _take(self.loads[move.dst], move, tokens, self.loads[move.src].batch)


def _lend(load: Load, move: Move, tokens: int) -> Load:
    return load._replace(
        pledged_blocks=load.pledged_blocks + move.num_blocks,
        context_tokens=max(0, load.context_tokens - tokens),
        remote=_one_more_row(load.remote, move.dst, tokens, load.batch),
        longest=tuple(_pledge(load.longest, move)),
    )


def _take(load: Load, move: Move, tokens: int, debtor_rows: int) -> Load:
    return load._replace(
        free_blocks=load.free_blocks - move.num_blocks,
        lent_blocks=load.lent_blocks + move.num_blocks,
        served=_one_more_row(load.served, move.src, tokens, debtor_rows),
    )


def _one_more_row(reads: tuple[RemoteRead, ...], peer: int, tokens: int, debtor_rows: int) -> tuple[RemoteRead, ...]:
    new = read_of(reads, peer).one_more_row(tokens, max(1, debtor_rows))
    return (*(read for read in reads if read.peer != peer), new)


def _pledge(requests: Iterable[Movable], move: Move) -> Iterable[Movable]:
    for request in requests:
        moved = move.num_blocks if request.req_id == move.req_id else 0
        yield request._replace(movable_blocks=request.movable_blocks - moved) if moved else request
