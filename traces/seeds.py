"""Named random streams. One seed gives independent streams, so that changing one draw (a rate, a split) moves no other."""

import numpy as np

STREAMS = {
    "context": 0,  # context lengths
    "output": 1,  # output lengths
    "mixture": 2,  # which component a request is drawn from
    "pin": 3,  # where the pinned longest request stands
    "arrivals": 4,  # gaps
    "think": 5,  # think times of a closed loop
    "jitter": 6,  # place within a coarse clock's tick
    "client": 7,  # ServeGen clients, one substream each
}


def stream(seed: int, name: str, *substream: int) -> np.random.Generator:
    """The generator of stream `name` (a key of `STREAMS`) of `seed`, or of a numbered part of it."""
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAMS[name], *substream))
    return np.random.Generator(np.random.PCG64(sequence))
