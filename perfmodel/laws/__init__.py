"""Laws of single operators on one GPU: seconds from sizes, with few parameters, monotone, never below the roofline.

A law is plain data. Its `domain` says where it was measured; None means that it was not (analytic).
"""
