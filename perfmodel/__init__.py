"""The shared core: pure state machines and cost models that both the simulator and the real backend drive.

Takes arrays and objects, opens no file, reads no clock, draws no random number of its own. A machine's `handle(event, now_s)`
returns commands; a driver carries them out and feeds their completion back as events.
"""
