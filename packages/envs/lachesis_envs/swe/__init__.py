"""Software tasks: real fixes of Python packages and mutations of them, as folders that `HermesSweEnv` runs."""
