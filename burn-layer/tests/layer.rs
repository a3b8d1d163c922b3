//! Tests of burn-layer.

mod suite {
    mod average;
    mod batch;
    mod batch_norm;
    mod casts_ahead;
    mod channels;
    mod checkpointing;
    mod child;
    mod clip;
    mod custom_ops;
    mod delegation;
    mod devices;
    #[cfg(feature = "signal")]
    mod fft;
    mod frames;
    mod identity;
    mod layer_norm;
    mod lease;
    mod linear;
    mod made;
    mod op_table;
    mod own;
    mod panics;
    mod products;
    mod provenance;
    mod recompute;
    mod reduce;
    mod rms_norm;
    mod rotation;
    mod rowwise;
    mod scope;
    mod service;
    mod settings;
    mod softmax;
    mod streams;
}
