//! Tests of burn-amp.

mod suite {
    mod autocast;
    mod device;
    mod loss_scaler;
    mod nan_guard;
    mod policy;
    mod region;
}
