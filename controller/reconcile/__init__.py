"""Parts that all reconcilers share: watch events, indexes, the plan, its executor, conditions."""
