"""The reading side: `reader` is one consumer, `cursor` one partition of it, and `starts` says where reading begins."""
