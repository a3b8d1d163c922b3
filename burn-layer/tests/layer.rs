//! Tests of burn-layer.

mod suite {
    mod delegation;
    mod devices;
    mod lease;
    mod made;
    mod op_table;
    mod own;
    mod reduce;
    mod scope;
    mod service;
}
