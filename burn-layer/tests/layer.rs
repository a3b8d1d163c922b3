//! Tests of burn-layer.

mod suite {
    mod delegation;
    mod op_table;
    mod service;
}
