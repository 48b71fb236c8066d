"""A road-sign classifier on a drive into bad weather: `signs` draws it, `drive` runs and plots it."""
