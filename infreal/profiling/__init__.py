"""`infreal profile`: what the cost model needs to know of this machine, as rows of a profile (design.md §5).

An operator is measured as an iteration meets it: a layer without its attention over all layers in turn, so that weights come from
memory as they do in a forward pass; attention likewise, each row over blocks of its own. Times are of one layer where an operator
is of a layer.
"""
