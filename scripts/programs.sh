#!/bin/sh
# Install agent programs into the folder $1, unmodified, from PyPI and npm: what `make test-programs` plays.
set -eu
folder=$1 python=${PYTHON:-python3}
mkdir -p "$folder"
venv() {
  name=$1
  shift
  [ -e "$folder/$name/.ready" ] && return
  "$python" -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
  touch "$folder/$name/.ready"
}
venv mini-swe-agent mini-swe-agent==2.4.6 mcp==2.3.0 # litellm imports mcp, and does not depend on it
venv sdks openai-agents==0.24.0 anthropic==2.12.0
if command -v npm >/dev/null && [ ! -e "$folder/node/.ready" ]; then
  mkdir -p "$folder/node"
  npm install --silent --no-fund --no-audit --prefix "$folder/node" \
    @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.197
  touch "$folder/node/.ready"
fi
