//! Delegation of Burn's op traits.

mod again;
pub(crate) mod call;
mod delegate;
mod distributed;
mod lineage;
pub(crate) mod table;
mod transaction;
