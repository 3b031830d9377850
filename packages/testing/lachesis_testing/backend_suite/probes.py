"""Helpers of backend tests, which attacks use as well."""

from lachesis_testing.attacks.probes import host_processes as host_processes
from lachesis_testing.attacks.probes import opened as opened
from lachesis_testing.attacks.probes import output as output
from lachesis_testing.attacks.probes import stopped as stopped
from lachesis_testing.attacks.probes import until as until
