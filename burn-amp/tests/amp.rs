//! Tests of burn-amp.

mod suite {
    mod alone;
    mod autocast;
    mod checkpointing;
    mod checkpointing_weights;
    mod device;
    mod devices;
    mod exact;
    #[cfg(feature = "signal")]
    mod fft;
    mod fp8;
    mod fp8_accuracy;
    mod fp8_elsewhere;
    mod fp8_history;
    mod fp8_products;
    mod fp8_programs;
    mod fp8_random;
    mod fp8_rounds;
    mod fp8_state;
    mod gates;
    mod gradients;
    mod inside;
    mod learner;
    mod logged;
    mod loss_scaler;
    mod loss_scaler_device;
    mod loss_scaler_device_optimizers;
    mod loss_scaler_learner;
    mod loss_scaler_optimizers;
    mod loss_scaler_own_optimizer;
    mod loss_scaler_ranks;
    mod loss_scaler_state;
    mod loss_scaler_steps;
    mod loss_scaler_support;
    mod loss_scaler_tied;
    mod loss_scaler_together;
    mod loss_scaler_unchecked;
    mod masks;
    mod modules;
    mod nan_guard;
    mod policy;
    mod programs;
    mod pytorch_lists;
    #[path = "../../../burn-fp8/tests/suite/random/check.rs"]
    mod random_cases;
    mod recompute;
    mod reduction;
    mod region;
    mod squares;
    mod training;
    mod transparent;
    mod underflow;
}
