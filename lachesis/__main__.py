"""`python -m lachesis`."""

from lachesis.cli import main
from lachesis.cli.ending import end_with

end_with(main)
