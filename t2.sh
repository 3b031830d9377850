(.venv/bin/pytest -q tests/runs/test_interrupted.py tests/runs/test_content_dodges.py tests/runs/test_process.py tests/runs/test_rewards.py tests/runs/test_serve.py > /work/tmp/t2.log 2>&1; echo "rc $?" >> /work/tmp/t2.log) &
wait
