"""Instances, gManager and dispatcher as actors: each machine of the core in a host of its own, in real time.

`host` one machine, its timers and its diary · `mail` what hosts send each other besides the core's events · `instance` a host whose
machine has the ranks of an instance at work · `orders`, `rank` what they do: iterations, serving, copies · `ranks`, `channel`,
`follower` how all do the same · `head` arrivals, books and faults · `fleet` what the head asks of those who run the hosts ·
`ray_fleet`, `actor` hosts as Ray actors. Nobody but a host touches its machine.
"""
