"""Running an environment: settings, model servers, `process`, `evaluate` and `serve`, progress and reports."""
