"""The simulator's own speed: fixed cases, measured in fresh processes, kept with the commit and compared with the last time.

python -m infsim.bench [--only CASE] [--out DIR]
"""
