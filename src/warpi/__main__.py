"""`python -m warpi`, for where nothing is installed."""

from warpi.cli.app import main

raise SystemExit(main())
