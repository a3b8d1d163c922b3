//! Delegation of Burn's op traits.

pub(crate) mod call;
mod delegate;
mod distributed;
pub(crate) mod table;
mod transaction;
