"""A reference engine: paged memory, block tables, layers and ranks without a model, every byte verified.

`engine.ReferenceEngine` is the whole; `scheduler` decides, `rank` and `layers` do what an engine adapter's
hooks do, `model` says which bytes are right.
"""
