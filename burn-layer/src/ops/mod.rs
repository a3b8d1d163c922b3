//! Delegation of Burn's op traits.

pub(crate) mod call;
mod delegate;
mod distributed;
mod lineage;
pub(crate) mod table;
mod transaction;
