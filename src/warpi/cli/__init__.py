"""The command line: one module per command, which parses flags and prints results."""

from warpi.cli.app import main as main
