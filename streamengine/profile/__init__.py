"""What compiled pieces cost: `record` is the document that is measured, `report` and `diff` read it."""
