//! Tests of burn-amp.

mod suite {
    mod autocast;
    mod loss_scaler;
    mod policy;
}
