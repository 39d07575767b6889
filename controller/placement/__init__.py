"""The queue: which pod or MetalProcess gets which node or host, in which order, and what ends for it.

Objects become units (`observed_units`) and cells (`cell_registry`). `planner` decides a round by these alone, and
`admission` carries it out, fenced by `ledger`. `board` and `explanation` say why a unit waits.
"""
