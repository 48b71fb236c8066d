"""A road-sign classifier on a drive into bad weather: `signs` draws it, `drive` runs it, `picture` plots it."""
