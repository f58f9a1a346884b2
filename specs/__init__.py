"""The documents of Meshwright: models, clusters, workloads, profiles, plans, predictions and measurements."""
