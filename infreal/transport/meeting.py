"""Generations of a pair of ranks, kept in a store that both see."""

from torch.distributed import PrefixStore, Store


class Meeting:
    """One rank's view of its pair with `peer`. joined: the generation in which it takes part; 0 unless it has reset."""

    def __init__(self, store: Store, rank: int, peer: int) -> None:
        self.side = int(rank > peer)
        self._store = PrefixStore(f"pair/{min(rank, peer)}/{max(rank, peer)}", store)
        self.joined = 0
        self._is_mine = False

    def newest(self) -> int:
        return int(self._store.compare_set("generation", "", "0"))

    def is_former(self) -> bool:
        return self.newest() > self.joined

    def try_stay(self) -> bool:
        """Whether this rank may use the generation it has joined: it is the newest, and nobody used it in this rank's name."""
        self._is_mine = self._is_mine or self._claim(self.joined)
        return self._is_mine and not self.is_former()

    def join_next(self) -> None:
        """Opens the next generation, or joins the one that the peer has opened."""
        while True:
            newest = self.newest()
            if newest > self.joined and self._claim(newest):
                self.joined, self._is_mine = newest, True
                return
            self._store.compare_set("generation", str(newest), str(newest + 1))

    def lane_store(self, lane: int) -> Store:
        return PrefixStore(f"{self.joined}/{lane}", self._store)

    def note_break(self) -> None:
        """For the peer, who sees its connection close: this side lives and has given up the generation."""
        self._store.set(f"{self.joined}/broken", "")

    def was_broken(self) -> bool:
        return self._store.check([f"{self.joined}/broken"]) or self.is_former()

    def _claim(self, generation: int) -> bool:
        """False where a rank of the same number has taken part before: it was restarted."""
        return self._store.add(f"{generation}/side/{self.side}", 1) == 1
