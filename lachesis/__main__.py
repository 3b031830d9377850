"""`python -m lachesis`."""

from lachesis.cli import main
from lachesis.runs.ending import end_with

end_with(main)
