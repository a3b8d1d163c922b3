//! Tests of burn-amp.

mod suite {
    mod alone;
    mod autocast;
    mod loss_scaler;
    mod modules;
    mod policy;
    mod pytorch_lists;
    mod transparent;
    mod underflow;
}
