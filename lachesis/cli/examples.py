"""Examples of verbs, as their helps show them."""

EXAMPLES = {
    "": """
lachesis demo                   a first run, on this machine
lachesis new sort-words         a new environment, and its test
lachesis check sort_words.py    mistakes in it, found without a model
lachesis eval sort_words.py -n 20 -m MODEL -b http://127.0.0.1:8000/v1
lachesis view data              every rollout, in a browser""",
    "api": """
lachesis api                                   on port 8000, groups and batches in data/api.db
lachesis api --port 9000 --db runs/api.db""",
    "audit": """
lachesis audit env.py
lachesis audit gsm8k --items 4 --json audit.json""",
    "batch": """
lachesis batch prompts.jsonl -m MODEL -b http://127.0.0.1:8000/v1     into data/prompts
lachesis batch merge data/RUN                                         join the shards of a run""",
    "batch merge": "lachesis batch merge data/RUN",
    "chat": """
lachesis chat terminal -m MODEL -b http://127.0.0.1:8000/v1
lachesis chat gsm8k --item 3 --as agent                       you are the model
lachesis chat gsm8k --replay results#4f2a --at 2 -m MODEL     a recorded rollout up to turn 2, then MODEL""",
    "check": """
lachesis check env.py
lachesis check terminal -n 3""",
    "compress": """
lachesis compress data/run --target-max-tokens 16000 --tokenizer Qwen/Qwen3-8B
lachesis compress trajectories.jsonl --dry-run
lachesis compress trajectories.jsonl --extractive             without a model""",
    "demo": """
lachesis demo
lachesis demo --items 2 --open""",
    "doctor": """
lachesis doctor                                         everything
lachesis doctor train                                   what training needs
lachesis doctor -m MODEL -b http://127.0.0.1:8000/v1    a model server""",
    "engine": "lachesis engine --model smollm2 --lora-layers 10",
    "envs": "lachesis envs",
    "eval": """
lachesis eval gsm8k -n 20 -r 3 -m MODEL -b http://127.0.0.1:8000/v1
lachesis eval env.py -n 4 -m reference                        its reference policy, without a model
lachesis eval compare data/a data/b                           two finished evaluations""",
    "eval compare": """
lachesis eval compare data/a data/b
lachesis eval compare data/a data/b --html compared.html""",
    "eval regrade": "lachesis eval regrade data/tasks",
    "export": """
lachesis export data/run --format openai --min-reward 1 -o openai.jsonl
lachesis export data/run --format inspect -o run.eval
lachesis export --run-dir data/train/NAME --to model.gguf     the trained model""",
    "fake-server": """
lachesis fake-server
lachesis fake-server --policy tools --latency 0.2-3 --max-concurrency 64""",
    "images build": "lachesis images build FOLDER --file Dockerfile",
    "images prune": "lachesis images prune --unused 7",
    "images": """
lachesis images build FOLDER
lachesis images prune --unused 7""",
    "new": """
lachesis new sort-words
lachesis new find-bugs --kind swe""",
    "play": """
lachesis play their_env.py process -n 2 -m MODEL -b http://127.0.0.1:8000/v1
lachesis play their_env.py evaluate""",
    "policy": """
lachesis policy --run-dir data/train/tool-call
lachesis policy --run-dir data/train/tool-call --base         the model before training""",
    "pool": """
lachesis pool up --engine slurm --slots 16 --most 4           until Ctrl-C or `down`
lachesis pool worker --connect URL --slots 16                 by hand, on a machine
lachesis pool status
lachesis pool down""",
    "pool up": "lachesis pool up --engine slurm --slots 16 --most 4",
    "pool worker": "lachesis pool worker --connect URL --slots 16",
    "process": """
lachesis process env.py -n 20 -r 8 -m MODEL -b http://127.0.0.1:8000/v1
lachesis process env.py -n 4 -m reference                     its reference policy, without a model""",
    "report": "lachesis report data/gsm8k/groups.jsonl",
    "sandboxes": """
lachesis sandboxes list
lachesis sandboxes reap
lachesis sandboxes attack --backend local""",
    "sandboxes attack": "lachesis sandboxes attack --backend local",
    "serve": """
lachesis serve env.py -r 8 -m MODEL -b http://127.0.0.1:8001/v1 --openai.server_type vllm
lachesis serve env.py --config train.yaml""",
    "serve ENV --as": "lachesis serve gsm8k --as openenv",
    "tasks": """
lachesis tasks show tasks
lachesis tasks verify tasks/my-task
lachesis tasks build tasks --only sqlparse-784 --mutations 5""",
    "tasks build": """
lachesis tasks build tasks --only sqlparse-784 --mutations 5
lachesis tasks build tasks --recipe fixes/recipe.toml --write-expected""",
    "tasks convert": "lachesis tasks convert princeton-nlp/SWE-bench_Verified tasks",
    "tasks show": "lachesis tasks show tasks",
    "tasks verify": "lachesis tasks verify tasks/my-task --times 2",
    "train": """
lachesis train --env tool_call --config configs/train_tool_call.yaml
lachesis train --env env.py --warm-start 48 --training.base_model smollm2 --training.num_steps 100
lachesis train --sft data/run/trajectory_samples.jsonl --training.base_model smollm2
lachesis train --rehearse --env env.py --servers 2      what a run would do, in virtual time""",
    "train --rehearse": "lachesis train --rehearse --env gsm8k --servers 2 --tokens-per-second 2000 --tokens 50-400",
    "trajectories": """
lachesis trajectories stats data/run/trajectory_samples.jsonl
lachesis trajectories show data/run/trajectory_samples.jsonl""",
    "verify": "lachesis verify data/run/groups.jsonl",
    "view": """
lachesis view                                                 the runs below data/
lachesis view runs --port 8000 --open""",
}
"""By verb; the first are those of `lachesis --help`. A test looks up each flag of them."""
