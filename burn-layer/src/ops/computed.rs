//! The backend's computation of an op, in another shape where the backend cannot compute it as it is.

/// Has the backend compute an op.
macro_rules! computed {
    ($call:ident, float_matmul, $x:ident, $y:ident) => {
        $call.product($x, $y)
    };
    ($call:ident, float_select_assign, $($arg:ident),*) => {
        select_assign::<B>(&$call.layer(), $($arg),*)
    };
    ($call:ident, embedding_backward, $($arg:ident),*) => {
        embedding_backward::<B>(&$call.layer(), $($arg),*)
    };
    ($call:ident, float_sum_dim, $x:ident, $dim:ident) => {
        sum_of_rows::<B>(&$call.layer(), $x, &[$dim])
    };
    ($call:ident, float_sum_dims, $x:ident, $dims:ident) => {
        sum_of_rows::<B>(&$call.layer(), $x, $dims)
    };
    ($call:ident, conv1d, $($arg:ident),*) => {
        forward::<B, _>(&$call.layer(), $($arg),*, B::conv1d)
    };
    ($call:ident, conv2d, $($arg:ident),*) => {
        forward::<B, _>(&$call.layer(), $($arg),*, B::conv2d)
    };
    ($call:ident, conv3d, $($arg:ident),*) => {
        forward::<B, _>(&$call.layer(), $($arg),*, B::conv3d)
    };
    ($call:ident, conv1d_x_backward, $($arg:ident),*) => {
        x_backward::<B, _>(&$call.layer(), $($arg),*, B::conv1d_x_backward, B::conv1d)
    };
    ($call:ident, conv2d_x_backward, $($arg:ident),*) => {
        x_backward::<B, _>(&$call.layer(), $($arg),*, B::conv2d_x_backward, B::conv2d)
    };
    ($call:ident, conv3d_x_backward, $($arg:ident),*) => {
        x_backward::<B, _>(&$call.layer(), $($arg),*, B::conv3d_x_backward, B::conv3d)
    };
    ($call:ident, conv1d_weight_backward, $($arg:ident),*) => {
        weight_backward::<B, _>(&$call.layer(), $($arg),*, B::conv1d_weight_backward)
    };
    ($call:ident, conv2d_weight_backward, $($arg:ident),*) => {
        weight_backward::<B, _>(&$call.layer(), $($arg),*, B::conv2d_weight_backward)
    };
    ($call:ident, conv3d_weight_backward, $($arg:ident),*) => {
        weight_backward::<B, _>(&$call.layer(), $($arg),*, B::conv3d_weight_backward)
    };
    ($call:ident, $name:ident, $($arg:ident),*) => {
        B::$name($($arg),*)
    };
}
pub(super) use computed;
