"""The coordinator: command contract, staging, sessions, leases, supervision. Knows no arithmetic."""
