"""The subcommands of `offload`, one module each; see `offload.cli` for what such a module has."""
