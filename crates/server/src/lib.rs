//! Serves.
