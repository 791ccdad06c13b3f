"""The shipped configuration, importable as `specplug.conf` so that Hydra finds it from anywhere."""
