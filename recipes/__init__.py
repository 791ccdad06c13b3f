"""One file per recipe; each has `run(config, folder) -> exit code`."""
