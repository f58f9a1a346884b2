"""Op sharding: placements of the ops of one block on a device mesh, found by an integer linear program."""
