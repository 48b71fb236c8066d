"""An embedded road-sign classifier on a drive into bad weather."""
