//! Weight compression.
