"""AcceleratorPools: what users see of them."""
