"""Running an environment: settings, model servers, `process`, `eval` and `serve`, progress and reports."""
