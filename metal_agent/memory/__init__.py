"""The memory of the host: ledger, admission, monitor, and the reaction to memory pressure."""
