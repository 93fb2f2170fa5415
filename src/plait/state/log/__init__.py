"""What was committed: manifests, catalogs, events, and the checkpoint that holds them."""
