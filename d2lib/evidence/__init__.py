"""Evidence: phases, receipts, the ledger, the papermill engine, verification. Knows no torch."""
