"""From a YAML configuration to run folders, whoever carries the runs out."""
