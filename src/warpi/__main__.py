"""Entry point of `python -m warpi`."""

from warpi.cli.app import main

raise SystemExit(main())
